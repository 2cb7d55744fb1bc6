"""Rules on memory (ME) and on the consistency of a config with its workload (CF)."""
