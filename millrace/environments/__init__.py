"""Who the policy talks to."""
