"""One decoding step: scores and choice, selected and window attention, merge."""
