"""The store: file formats, commit records, and all reading and writing of disks and object storage."""
