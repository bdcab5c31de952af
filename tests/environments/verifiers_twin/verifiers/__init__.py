"""In the place of verifiers, as far as our program calls it: tasks that guess a number, and fail as they say."""
