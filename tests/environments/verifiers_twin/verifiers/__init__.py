"""In the place of verifiers, as far as our program calls it: tasks that guess, or fail as they name it."""
