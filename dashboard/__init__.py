"""The dashboard: shows the store's results in the browser."""
