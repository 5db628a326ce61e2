"""Text that a training learns from: the bytes of files, or the tokens of a dataset's documents."""
