"""The form of values, errors and engine calls on the wire, for every interface and every language."""
