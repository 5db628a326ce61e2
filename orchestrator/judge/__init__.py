"""Go/no-go rules and their verdicts on stored measurements."""
