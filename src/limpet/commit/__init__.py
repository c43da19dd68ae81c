"""What every engine does around a commit: failures of a group, and requests that were superseded."""
