"""`horovodish check` and `--version`: what is installed, and whether ranks can be started."""
