"""Read images from folders, tables of labels and Hub data sets, and divide them into training and test images."""
