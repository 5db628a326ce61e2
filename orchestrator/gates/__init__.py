"""Go/no-go: rules, and the verdicts that they give on stored measurements."""
