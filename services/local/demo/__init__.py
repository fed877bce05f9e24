"""`orchard demo`: evaluates candidate patches on software-engineering tasks, each in its own sandbox."""
