"""Decide while training runs whether another plan is better: with measured windows and rates, and with free memory."""
