"""The SQLite engine: one file, shared by the processes of one machine."""
