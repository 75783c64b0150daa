import os, sys
print('attempt', os.environ['TORCHFERRY_ATTEMPT'], sys.argv[1:])
sys.exit(0 if os.environ['TORCHFERRY_ATTEMPT'] == '3' else int(os.environ['TORCHFERRY_ATTEMPT']) + 2)
