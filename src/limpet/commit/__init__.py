"""Rules that every engine follows around a commit: failures in a group of batches, and superseded requests."""
