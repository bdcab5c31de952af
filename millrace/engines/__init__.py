"""Engine backends: in this process, in subprocesses, on Ray."""
