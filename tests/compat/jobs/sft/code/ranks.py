import os
print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])
