"""Front-end processes: requests are judged, checked and answered."""
