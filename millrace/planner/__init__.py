"""What a run will need before it starts: weights, operations, memory of each rank, seconds of a step."""
