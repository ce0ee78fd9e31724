"""One run on this machine: who does its jobs, its rounds, its checkpoints, and many runs side by side."""
