"""`horovodish predict`: what more ranks, other links and other strategies would give."""
