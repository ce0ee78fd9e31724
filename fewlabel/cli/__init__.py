"""The command `fewlabel`: one module for each group of subcommands."""
