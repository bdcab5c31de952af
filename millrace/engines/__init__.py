"""Where engines run: in this process, in processes of their own, on Ray."""
