"""The results in the browser: reads the store, computes nothing."""
