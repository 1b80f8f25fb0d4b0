"""The engine core: which requests take which path, and what they hold."""
