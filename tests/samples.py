"""How many tokens the tests of distributions draw."""

import os

SAMPLES = int(os.environ.get("STATIC_SAMPLES", 2_000))  # 20,000 take four minutes in Triton's interpreter
