"""Statistics of evaluations: estimates per question, their errors, and comparisons. No torch."""
