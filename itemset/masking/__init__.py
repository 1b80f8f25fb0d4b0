"""What may follow: on the host, and on a device."""
