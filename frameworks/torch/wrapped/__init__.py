"""The classes of wrapped optimizers, a file for each kind, with the hooks that it registers."""
