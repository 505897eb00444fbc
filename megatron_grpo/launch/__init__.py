"""Starting and ending the processes of a run, without leaving any behind."""
