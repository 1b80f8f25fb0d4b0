"""The front-end process: requests are judged and answered."""
