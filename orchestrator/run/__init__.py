"""Drives one run: driver, plan, scheduler, executors, recorder, progress."""
