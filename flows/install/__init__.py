"""`penstock setup` and the checks for planned uses: what is installed, and what a use of Penstock still needs."""
