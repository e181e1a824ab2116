"""An elastic job: one start of ranks after the other, on the slots that there are."""
