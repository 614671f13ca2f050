"""The key-value cache: pages in three precisions, whoever holds their bytes.  See README.md."""
