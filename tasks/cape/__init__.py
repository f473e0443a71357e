"""Category-agnostic pose estimation: finds keypoints of any category, given one image with its keypoints."""
