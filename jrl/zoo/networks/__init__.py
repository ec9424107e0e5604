"""Networks that a method derives from the policy's: several policies, values of tokens."""
