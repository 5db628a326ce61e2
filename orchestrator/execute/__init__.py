"""Where points run, and their files."""
