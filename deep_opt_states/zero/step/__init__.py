"""Run each step: from the first gradient to the last updated parameter."""
