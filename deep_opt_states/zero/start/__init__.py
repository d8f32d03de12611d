"""Check, plan and reserve everything that the updates need: once, before the first step."""
