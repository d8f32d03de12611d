"""Does training with the real ZeRO-3 engine keep the promises? Each folder is one topic."""
