"""One attempt at one point, from the start of its process to the diagnosis of its end."""
