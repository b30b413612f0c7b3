"""First-party patterns."""
