"""In the place of verifiers, as far as our program calls it: tasks that guess, and fail as they say."""
