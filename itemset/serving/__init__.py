"""What every engine's plugin does: configuration, sets, requests, hooks."""
