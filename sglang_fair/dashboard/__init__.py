"""What operators watch: `sglang-fair dashboard`, a page, and `sglang-fair top`, the same on a terminal.

peers     asks the gateway and the replicas; a `Poller` does so every two seconds, however many people look
reading   what one look at the cluster found
history   pure: what replicas gave between two looks, and over time
model     pure: turns readings into what is shown (`view`)
server    serves the page in `page/`; `top` draws on a terminal
"""
