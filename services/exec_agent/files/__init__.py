"""The files of a sandbox: FileService of the agent."""
