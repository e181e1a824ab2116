"""`horovodish status`: what a running job does."""
