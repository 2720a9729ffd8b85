"""How trained weights reach running engines."""
