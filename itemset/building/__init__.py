"""From people's files to rows and keys."""
