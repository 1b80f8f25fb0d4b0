"""What model runner V1 needs, which CPUs run."""
