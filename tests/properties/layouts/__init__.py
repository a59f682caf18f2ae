"""Promise 1 as covering arrays: every two levels of factors meet daily, every three in prove; each row is proved."""
