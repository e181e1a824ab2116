"""`horovodish check` and `--version`: the installed software, and whether ranks can be started."""
